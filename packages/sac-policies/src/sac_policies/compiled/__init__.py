"""The backend of compiled code: it tags the traced graph with what a policy decides."""
