"""Files and batches without a cloud: a folder, a database in it, and who runs what it holds.

`file_routes`, `upload_routes` and `batch_routes` are what clients ask, `runner` carries every
batch to its end by way of `checking`, `answering` and `publishing`; `store` holds the tables of
files, uploads, batches and rows and the folder that their bytes lie in.
"""
