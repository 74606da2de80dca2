"""How drafts are accepted: greedily, with seeds by position, or synthetically."""
