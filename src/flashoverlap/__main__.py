"""``python -m flashoverlap``."""

from .cli import app

if __name__ == "__main__":
    app()
