"""Profiles from model configs and server flags."""
