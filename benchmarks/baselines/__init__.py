"""The systems compared with Workbench. Each offers ``add`` and ``step`` (see ``serving.replay``) or is a server."""
