"""Modules that every other package may import: value objects of steps and requests, errors, fault points, logging."""
