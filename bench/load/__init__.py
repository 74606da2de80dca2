"""The load generator: requests over HTTP, when they are sent, and what their times say."""
