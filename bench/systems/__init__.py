"""The systems that are compared: methods, and the servers that they run on."""
