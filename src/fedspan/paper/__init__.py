"""The paper's studies, regenerated from small text specs by the library itself."""
