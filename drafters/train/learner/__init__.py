"""Training a head further on captured traffic, and proving each candidate: `aerie learn`.

A parent of the standard library alone stops and continues a child that trains, as the gateway's
load allows. The child makes one candidate, in phases that a kill may interrupt anywhere.
"""
