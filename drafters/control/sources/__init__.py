"""What each source of drafts is worth, and which one drafts for a request."""
