// Package project is what the reader of the pages works on.
package project

func Add(a, b int) int { return a + b }
