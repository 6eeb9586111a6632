"""Images for Slurm clusters with Pyxis and Enroot: bring them into a folder, know what they are, and whether they are whole.

`reference` reads and spells their names, `checks` and `fetch` import them, `store` and `listing` judge the files, `view`
shows them. Only `tools` starts programs.
"""
