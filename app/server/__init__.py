"""The process: its socket and connections, its signals, its temporary files."""
