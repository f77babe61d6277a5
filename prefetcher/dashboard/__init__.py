"""What browsers get from the endpoint: scripts and pages as files, and how they are served."""
