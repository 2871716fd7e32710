"""`raysim report`: tables, figures and a page of a run, of a sweep, or of several of them, from their files.

`report` writes and shows; `results` reads, `statistics` computes, `tables` and `figures` lay out, `page` makes HTML.
"""
