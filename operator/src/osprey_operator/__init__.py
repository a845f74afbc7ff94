"""The operator: it watches both resources and their children, plans purely, and writes in one place.

`handlers` put keys on the `queue`; for each one `reconcile` makes a pass: `observe`, `plan`, `execute`. What children
look like is in `manifests`; what their pods say of themselves comes from `live`.
"""
