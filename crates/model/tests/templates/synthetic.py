"""Templates that use one feature each; what real templates use, and what lies next to it."""

def templates():
    return []
