"""Which initialisation leaks least?"""
