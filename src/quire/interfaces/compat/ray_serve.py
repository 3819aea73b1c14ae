"""The application for Ray Serve, under the name that `serve run quire.ray_serve:build_app` gives."""

from quire.server.ray_serve import build_app

__all__ = ["build_app"]
