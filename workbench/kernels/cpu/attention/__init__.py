"""Paged varlen attention compiled for this processor."""
