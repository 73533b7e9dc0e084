"""How much noise is enough, and whom does the same noise protect worst?"""
