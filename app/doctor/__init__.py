"""`aerie doctor`: is this machine fit to serve what the settings ask for?"""
