"""Files and Batches API of one machine: a data folder, an SQLite database and a batch runner.

`file_routes`, `upload_routes` and `batch_routes` are the API. `runner` takes each batch through
`validation`, `batch_run` and `publish`. `store` holds the tables of files, uploads, batches and
rows, and the folder with their bytes.
"""
