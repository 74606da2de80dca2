"""The web page at `/`: its files, and the figures that it polls once a second."""
