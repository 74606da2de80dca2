"""What is compared: methods, and the servers that they run on."""
