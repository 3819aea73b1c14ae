"""The engines that are compared, their processes, and how they are measured interleaved."""
