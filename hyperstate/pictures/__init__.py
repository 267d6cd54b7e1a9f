"""Who holds what, drawn: for terminals, notebooks and as a page.

drawing   what is to be drawn, in numbers: regions, bars, treemaps
picture   as text for a terminal
page      as a self-contained HTML page with SVG
visualize `visualize_sharding`, of a live state
"""
