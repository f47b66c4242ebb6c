// Lets Go declare a function without a body: rules, which is linked by its name.
