"""Prompt lookup: drafts that continue a repetition in a request's own text."""
