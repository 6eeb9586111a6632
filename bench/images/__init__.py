"""Container images for Slurm clusters with Pyxis and Enroot: import them into a folder and check the files there.

`reference` parses image names, `import_checks` and `importer` import images, `store`, `squashfs` and `digest` check
the files. `needed` knows which image has the packages of an engine. Only `tools` starts programs.
"""
