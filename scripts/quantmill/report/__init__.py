"""From result files to results.csv, results.json, the plot and the page. Nothing here measures."""
