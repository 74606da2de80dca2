"""Policies for K compared on one engine: windows in turn, paired ratios with intervals."""
