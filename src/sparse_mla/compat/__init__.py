"""Entry points of other libraries, answered by this one."""
