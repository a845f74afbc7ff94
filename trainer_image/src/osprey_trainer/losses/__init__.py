"""The readable loss and the fast one."""
