"""What every page and report is written with: reports on the terminal and in HTML say a size or a time the same way.

wording   sizes, durations, numbers, names as people read them
markup    elements of HTML, and the one place where text is escaped
page.css  the look that the self-contained pages share
"""
