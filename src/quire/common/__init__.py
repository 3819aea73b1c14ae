"""What every other package may import: value objects of a step and of requests, errors, fault points, logging."""
