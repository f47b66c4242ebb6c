module example.org/project

go 1.24
