"""Types of options that are numbers."""

from __future__ import annotations

import argparse
import math


def positive_int(text: str) -> int:
    """A whole number of at least 1. Raises argparse.ArgumentTypeError or ValueError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0. Raises argparse.ArgumentTypeError or ValueError."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def non_negative_int(text: str) -> int:
    """A whole number of at least 0. Raises argparse.ArgumentTypeError or ValueError."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def non_negative_float(text: str) -> float:
    """A finite number of at least 0. Raises argparse.ArgumentTypeError or ValueError."""
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def share(text: str) -> float:
    """A number from 0 to 1. Raises argparse.ArgumentTypeError or ValueError."""
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return value


def positive_share(text: str) -> float:
    """A number above 0, and at most 1. Raises argparse.ArgumentTypeError or ValueError."""
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def share_below_one(text: str) -> float:
    """A number from 0 to less than 1. Raises argparse.ArgumentTypeError or ValueError."""
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, got {text}")
    return value
