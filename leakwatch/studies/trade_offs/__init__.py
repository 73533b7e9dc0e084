"""What does a defense cost, and what does it buy?"""
