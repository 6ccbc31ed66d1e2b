"""Reports on models and meshes (later: hardware, cost model, mesh search, compiled audit)."""
