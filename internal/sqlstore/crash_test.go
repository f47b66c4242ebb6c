package sqlstore

// child is replaced when this binary is started to be killed; see TestKill.
func child() bool { return false }
