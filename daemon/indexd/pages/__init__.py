"""What every page and report is written with: reports on the terminal and in HTML say a size or a time the same way.

wording   sizes, durations, numbers, names as people read them
report    a report as one page of HTML, which asks no other host
page.css  the look that the self-contained pages share
"""
