"""Container images for Slurm clusters with Pyxis and Enroot: import them into a folder, and check the files there.

`reference` parses their names, `import_checks` and `importer` import them, `store` and `folder` check the files. Only
`tools` starts programs.
"""
