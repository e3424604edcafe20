"""Decoding with MTP modules: draft, verify, correct. Imports ``mtp`` only."""
