"""How do N values become one, or N equal ones?"""
