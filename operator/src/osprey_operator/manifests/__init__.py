"""Builders of the objects that the operator makes: pure functions from a resource to JSON, one file a child kind."""
