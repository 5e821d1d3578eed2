def write(known, out, parts): pass
