"""Tests of day0; folders mirror the code."""
