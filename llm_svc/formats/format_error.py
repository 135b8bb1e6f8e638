"""The error of every weight format; knows none of them."""

from __future__ import annotations


class FormatError(Exception):
    """Weights are not what their format says, or the format is none we serve; the message names tensor or field."""
