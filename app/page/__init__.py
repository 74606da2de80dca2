"""The page for people at `/`: its files, and the figures that it asks for once a second."""
