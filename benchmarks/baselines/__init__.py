"""What Workbench is compared with. Each offers ``add`` and ``step`` (see ``serving.replay``) or is a server."""
