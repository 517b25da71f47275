"""What people see: a batch as it is now, figures of a tenant, and finished rows by their lines."""
