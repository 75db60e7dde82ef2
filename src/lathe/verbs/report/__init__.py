"""What many runs say together: a table, intervals, comparisons, and a page that draws them."""
