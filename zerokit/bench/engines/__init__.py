"""Engines of the bench: `catalogue` names them, each other module is one adapter."""
