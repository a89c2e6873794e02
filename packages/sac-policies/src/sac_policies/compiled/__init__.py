"""The backend for compiled code: it tags the traced graph with a policy's decisions."""
